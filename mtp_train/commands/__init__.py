"""What the commands of ``mtp-train`` do; each returns a result that the command line prints."""
