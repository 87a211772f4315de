"""What the server of `ranks` loads once, so that its forks need not."""
