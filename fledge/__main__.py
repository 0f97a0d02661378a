from fledge.cli.main import main

main()
