"""Other APIs of the server, translated to and from chats."""
