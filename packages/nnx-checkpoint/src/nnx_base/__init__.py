"""The ground floor of nnx: errors, ranks and collectives, boxes, shards, dtypes; needs none of ours."""
