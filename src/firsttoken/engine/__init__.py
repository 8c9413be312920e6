"""The step loop: drain, plan, launch, harvest, emit. It imports no HTTP and never awaits."""
