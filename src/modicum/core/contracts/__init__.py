"""What every room's methods agree on: values, ledgers, traits, state, strategies."""
