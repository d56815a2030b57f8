"""Examines a deployment from outside: asks, tries handoffs, says what is wrong and what to do."""
