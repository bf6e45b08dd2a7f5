from kvhold.cli import main

main()
