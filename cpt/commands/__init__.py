"""One module or folder for each command: arguments in, words out."""
