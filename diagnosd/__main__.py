from diagnosd.cli import main

main()
