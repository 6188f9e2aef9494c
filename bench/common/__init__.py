"""What the benches share: states, rivals, limits, options, and results as JSON."""
