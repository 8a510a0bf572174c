"""The playground: a person plays a server's environments in the browser, and keeps episodes as demonstrations."""
