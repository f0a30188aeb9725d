"""Ways to do regions: on the GPU, on PIM, split, as pipelines, as groups of one kernel."""
