"""Tables that decide, the events they take and the effects that they lead to. Pure."""
