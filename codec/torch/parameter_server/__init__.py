"""Parameter servers: workers push frames of gradients, and pull their means (docs/methods/parameter-server.md)."""
