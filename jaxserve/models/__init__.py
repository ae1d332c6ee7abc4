"""Model families: pure functions over pytrees of parameters. Knows arrays and meshes; no requests, sockets or files."""
