"""Public names and documents that may change in any version. All other public names are stable from 0.1.0 on."""

NOTE = "Provisional: may change in any version."  # a paragraph of each docstring and document below

NAMES = (
    "codec.ActivationDelta",
    "codec.advise",
    "codec.kv",
    "codec.kv.PageCodec",
    "codec.integrations",  # with all of its modules
    "codec.torch.Auto",
    "codec.torch.OneBitAdam",
    "codec.torch.ParameterClient",
    "codec.torch.ParameterServer",
    "codec.torch.Rounds",
    "codec.torch.VarianceSchedule",
    "codec.torch.pipelining",  # with all of its names
    "codec.torch.saved_tensors",
)

# Documents, relative to docs/, each with the heading below which the note stands
DOCUMENTS = {
    "guides/federated-learning.md": "# Federated learning",
    "guides/frameworks.md": "# Training frameworks",
    "guides/gpu-c.md": "# C and C++ on GPUs",
    "guides/kv-caches.md": "# KV caches",
    "guides/torch/gpus.md": "## NCCL",
    "guides/torch/members.md": "## Rounds",
    "guides/torch-tensors.md": "## Activations",
    "guides/torch.md": "## Automatic choice",
    "guides/zarr.md": "# Zarr and numcodecs",
    "methods/activation-deltas.md": "# Deltas of activations",
    "methods/one-bit-adam.md": "# 1-bit Adam and 0/1 Adam",
    "methods/parameter-server.md": "# Parameter servers",
    "methods/pipelines.md": "# Pipelines",
    "reference/c.md": "## codec_cuda.h",
    "reference/cpp.md": "# C++",
    "spec/protocol.md": "# Messages between ranks",
}
