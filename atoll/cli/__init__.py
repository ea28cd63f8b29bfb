"""The command line. `main` has the commands; what a command does lies in a module of its own, imported when it runs."""
