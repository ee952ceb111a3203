"""What runs the lab: command line, tour, report, JupyterLab."""
