"""Data-plane transports behind one protocol: local, shm, tcp."""
