"""Does it fit, and how fast will it be: memory of each GPU and of the host, time and money, before anything is
built."""
