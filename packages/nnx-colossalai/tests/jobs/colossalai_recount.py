"""Random models and memory limits for the planner of nnx-colossalai, and a second count of their memory."""

import random

from nnx_colossalai.plan.spec import Group, ModelSpec, RankResources, Tier

HUGE = 10**15


def layers(count, numel=1000, *, activation=0, **options):
    groups = tuple(
        Group(
            name=f"layers.{at}",
            numel=numel,
            trainable=numel,
            activation_bytes=activation,
            compute_seconds=1e-3,
        )
        for at in range(count)
    )
    return ModelSpec(groups=groups, **options)


def llama(world_size=1, activation=70_000_000):
    """The shapes of a model of 6.7 billion parameters, one group per layer."""
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    head = 32000 * 4096
    names = [("embed", head), *((f"layers.{at}", layer) for at in range(32)), ("head", head), ("", 4096)]
    return ModelSpec(
        groups=tuple(
            Group(
                name=name,
                numel=numel,
                trainable=numel,
                activation_bytes=activation if name.startswith("layers") else 0,
                compute_seconds=6 * numel * 2048 / 4e14,
            )
            for name, numel in names
        ),
        world_size=world_size,
        other_device_bytes=2**30,
    )


def tiers_of(planned):
    return list(planned.placement.tiers.values())


MIXED = {"working_bytes": 2, "master_bytes": 4, "gradient_bytes": 4}
FULL = {"working_bytes": 4, "master_bytes": 4, "gradient_bytes": 4}


def random_spec(seed, most=7, nested=True):
    draw = random.Random(seed)
    names = [f"layers.{at}" for at in range(draw.randint(1, most))]
    if nested and len(names) > 3 and draw.random() < 0.4:
        names[1], names[2] = "layers.3.attention", "layers.3.mlp"
    if draw.random() < 0.5:
        names.append("")
    groups = []
    for name in names:
        numel = draw.choice([draw.randint(1, 2000), 1000, draw.randint(1, 100_000)])
        trainable = draw.choice([numel, numel, numel, 0, draw.randint(0, numel)])
        groups.append(
            Group(
                name=name,
                numel=numel,
                trainable=trainable,
                activation_bytes=draw.choice([0, draw.randint(0, 200_000)]),
                compute_seconds=draw.choice([0.0, 1e-5, 1e-4, 1e-3]) * draw.random(),
            )
        )
    return ModelSpec(
        groups=tuple(groups),
        world_size=draw.choice([1, 1, 2, 4, 8]),
        **draw.choice([MIXED, FULL]),
        optimizer_bytes=draw.choice([0, 4, 8]),
        other_device_bytes=draw.choice([0, 10_000]),
        gradients_in_forward=draw.random() < 0.5,
    )


def random_resources(seed, spec):
    draw = random.Random(seed)
    most, none = recount(spec, [Tier.GATHERED] * len(spec.groups))
    least, host = recount(spec, [Tier.STREAMED] * len(spec.groups))
    return RankResources(
        device_bytes=int(least + (most - least) * draw.uniform(-0.2, 1.1)),
        host_bytes=int(none + (host - none) * draw.uniform(0.2, 1.3)),
        **{
            rate: scale * draw.choice([0.01, 0.1, 1.0, 10.0])
            for rate, scale in (
                ("to_device", 1e9),
                ("to_host", 1e9),
                ("host_step", 1e8),
                ("device_step", 1e9),
                ("collective", 1e9),
            )
        },
    )


def recount(spec, tiers):
    """Most device and host bytes, by writing down every allocation with its first and last moment."""
    count, ranks = len(spec.groups), spec.world_size
    own = spec.master_bytes == spec.working_bytes
    whole_step = (0, 2 * count)
    alive = []  # bytes, first moment, last moment
    host = 0
    staging = []
    uses = []
    for at, group in enumerate(spec.groups):
        users = [
            other
            for other, inner in enumerate(spec.groups)
            if other == at or group.name == "" or inner.name.startswith(f"{group.name}.")
        ]
        uses.append((min(users), max(users)))

    def backward(at):
        return 2 * count - 1 - at

    sent = []  # gradients to host memory at one rank: bytes, first moment at which there are some
    fetched = []  # of groups whose weights come from elsewhere: first moment of use, bytes, in each direction
    for group, tier, (first, last) in zip(spec.groups, tiers, uses, strict=True):
        part, trained = -(-group.numel // ranks), -(-group.trainable // ranks)
        w, m, g = spec.working_bytes, spec.master_bytes, spec.gradient_bytes
        if tier in (Tier.GATHERED, Tier.SHARDED):
            alive.append((part * m + trained * spec.optimizer_bytes, *whole_step))
            if ranks == 1 and not own:
                alive.append((part * w, *whole_step))
            alive.append((trained * g, 0 if spec.gradients_in_forward else backward(last), 2 * count))
        else:
            host += part * m + trained * g + trained * spec.optimizer_bytes
            staging.append(max(part * w, trained * g))
            if tier is Tier.OFFLOADED:
                alive.append((part * w, *whole_step))
            elif ranks == 1 or not own:
                host += part * w
        using = [(first, last), (backward(last), backward(first))]
        if ranks == 1:
            if tier is Tier.STREAMED:
                alive += [(group.numel * w, *use) for use in using]
                fetched.append((group.numel * w, [first, backward(last)]))
            if tier in (Tier.OFFLOADED, Tier.STREAMED):
                sent.append((group.trainable * w, using[1][0]))
            elif g != w:
                alive.append((group.trainable * w, *using[1]))
            continue
        landing = group.numel * w + (part * w if tier is Tier.STREAMED else 0)
        if tier is Tier.GATHERED:
            alive.append((group.numel * w, first, backward(first)))
            alive.append((landing, first, first))
            fetched.append((landing, [first]))
        else:
            alive += [(group.numel * w, *use) for use in using]
            alive += [(landing, use[0], use[0]) for use in using]
            fetched.append((landing, [first, backward(last)]))
        alive.append((group.trainable * w, *using[1]))
        reducing = group.trainable * g + (trained * g if tier in (Tier.OFFLOADED, Tier.STREAMED) else 0)
        alive.append((reducing, using[1][0], min(using[1][1] + 1, 2 * count - 1)))

    for size, begins in fetched:
        alive += [(size, begin - 1, begin - 1) for begin in begins if begin not in (0, count)]
    most_under_way = 2 * spec.working_bytes * max(group.numel for group in spec.groups)
    for now in range(count, 2 * count):
        alive.append((min(most_under_way, sum(size for size, begin in sent if begin <= now)), now, now))
    for at, group in enumerate(spec.groups):
        alive.append((group.activation_bytes, at, backward(at)))
    device = max(
        sum(size for size, begin, end in alive if begin <= now <= end) for now in range(2 * count + 1)
    )
    return device + spec.other_device_bytes, host + sum(sorted(staging)[-2:])
