"""`vserve bench`: measures a server over HTTP, the engine without HTTP, and how long starting takes."""
