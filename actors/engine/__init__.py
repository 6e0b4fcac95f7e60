"""What an attention worker runs: scheduler, memory pools, step loop."""
