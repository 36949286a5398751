"""Parameter servers: workers push frames of gradients and pull means (docs/methods/parameter-server.md)."""
