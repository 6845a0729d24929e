"""The report of a conformance run as data, as text and as a badge."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from nnx_conformance.report import Report, Result, Verdict


def report(*verdicts: Verdict) -> Report:
    results = [
        Result(f"check_{number}", "numbers", "It works.", verdict, "why", 0.25)
        for number, verdict in enumerate(verdicts)
    ]
    return Report(
        strategy="mine",
        kind="backend",
        owner="acme 1.0",
        target="acme:Backend",
        profile="fast",
        versions={"python": "3.11"},
        results=results,
        seconds=1.5,
    )


@pytest.mark.parametrize(
    ("verdicts", "ok", "summary"),
    [
        ((), True, ""),
        (("passed", "passed"), True, "2 passed"),
        (("undeclared", "skipped", "passed"), True, "1 passed, 1 skipped, 1 undeclared"),
        (("skipped", "failed", "passed", "failed"), False, "1 passed, 2 failed, 1 skipped"),
    ],
)
def test_a_report_is_well_unless_a_check_failed(
    verdicts: tuple[Verdict, ...], ok: bool, summary: str
) -> None:
    made = report(*verdicts)
    assert (made.ok, made.summary()) == (ok, summary)
    assert [result.verdict for result in made.failures] == ["failed"] * verdicts.count("failed")


def test_a_report_as_data_survives_json() -> None:
    data = report("failed", "passed").as_dict()
    assert json.loads(json.dumps(data)) == data
    assert {name: data[name] for name in ("schema", "ok", "summary", "profile", "seconds")} == {
        "schema": 1,
        "ok": False,
        "summary": "1 passed, 1 failed",
        "profile": "fast",
        "seconds": 1.5,
    }
    assert data["results"][1] == {
        "check": "check_1",
        "group": "numbers",
        "promise": "It works.",
        "verdict": "passed",
        "detail": "why",
        "seconds": 0.25,
        "log": "",
    }


@pytest.mark.parametrize(
    ("verdicts", "text", "colour"),
    [
        (("passed", "passed", "skipped"), "2 checks passed", "#2e7d32"),
        (("passed",), "1 check passed", "#2e7d32"),
        (("undeclared",), "1 check passed", "#2e7d32"),
        (("passed", "failed"), "1 check failed", "#c62828"),
        (("failed", "failed"), "2 checks failed", "#c62828"),
    ],
)
def test_the_badge_is_an_image_that_says_how_it_went(
    verdicts: tuple[Verdict, ...], text: str, colour: str
) -> None:
    image = ElementTree.fromstring(report(*verdicts).badge())
    assert image.tag == "{http://www.w3.org/2000/svg}svg"
    assert image.attrib["aria-label"] == f"nnx conformance: {text}"
    texts = [element.text for element in image.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["nnx conformance", text]
    boxes = [element.attrib for element in image.iter("{http://www.w3.org/2000/svg}rect")]
    assert boxes[1]["fill"] == colour
    assert sum(int(box["width"]) for box in boxes) == int(image.attrib["width"])
    assert int(boxes[1]["width"]) >= 6.5 * len(text), "the text would not fit"
