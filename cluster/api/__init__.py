"""The front door: gRPC services, their client, and the way from a gateway to the workers."""
