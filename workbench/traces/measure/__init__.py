"""Takes traces with torch's profiler: in this process, in a launched run, in a script that nobody edited."""
