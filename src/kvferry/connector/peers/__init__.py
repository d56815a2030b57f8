"""Other instances: control sockets, sessions, links, and what is posted on them."""
