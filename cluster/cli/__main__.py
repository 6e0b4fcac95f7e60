"""`python -m cluster.cli` is `latentmesh`."""

from cluster.cli.app import main

main()
