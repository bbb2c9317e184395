"""Several models and instances of them behind one server; it needs the extra `server`."""
