"""The console command `baton`. Its start imports neither ray nor vllm nor torch, which take seconds."""
