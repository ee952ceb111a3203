"""What every room needs: files, parallel work, the machine, argument checks."""
