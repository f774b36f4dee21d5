"""The commands, a file each; `modicum.cli.app` registers them."""
