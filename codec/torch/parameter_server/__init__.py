"""Parameter servers: workers push frames of gradients and pull means (docs/parameter-server.md)."""
