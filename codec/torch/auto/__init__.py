"""Choice of codecs from measurements, equal on all ranks. It sends nothing: hooks and stages carry its reports.

`quality.py` turns the user's floor into specs, `meter.py` and `costs.py` measure, `selector.py` decides, and
`gradients.py` and `edges.py` apply the decisions to hooks of DistributedDataParallel and to edges of pipelines.
"""
