"""Who owns which block of an instance's pool: references, leases, quarantine, integrity."""
