"""One file for each command or group of commands, as `meshtrain --help` lists them."""
