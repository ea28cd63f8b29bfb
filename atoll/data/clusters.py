"""Clusters of documents that use the same words: the second way to make shards that differ.

k-means over hashed word counts, as many clusters as replicas, as in the DiLoCo paper's non-i.i.d. setting (there over
features of a pretrained model; words need none). scikit-learn is an extra and imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.errors import DataError

NUM_FEATURES = 2**12
SAMPLE_DOCUMENTS = 50_000  # the centres are found on at most so many documents


def cluster_documents(texts: Sequence[str], *, num_clusters: int, seed: int) -> NDArray[np.int64]:
    """The cluster of each text, int64 [num_texts] in [0, num_clusters). The same texts and seed give the same clusters.

    Raises `DataError` where scikit-learn is missing or there are fewer texts than clusters.
    """
    if num_clusters == 1:
        return np.zeros(len(texts), np.int64)
    if len(texts) < num_clusters:
        raise DataError(
            f"replicas={num_clusters} is more than the {len(texts)} training documents; with data.shard='cluster' each "
            f"replica has documents of its own.\nUse at most {len(texts)} replicas, or data.shard='iid'."
        )
    try:
        from sklearn.cluster import MiniBatchKMeans
        from sklearn.feature_extraction.text import HashingVectorizer
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise DataError("data.shard='cluster' needs scikit-learn. Run: pip install 'atoll[clusters]'") from error
    features = HashingVectorizer(n_features=NUM_FEATURES).transform(texts)
    sample = np.random.default_rng(seed).permutation(len(texts))[:SAMPLE_DOCUMENTS]
    kmeans = MiniBatchKMeans(n_clusters=num_clusters, random_state=seed % 2**32, n_init=3, batch_size=1024)
    with threadpool_limits(limits=1):  # sums in one order: every process of a run must find the same clusters
        kmeans.fit(features[sample])
        labels = kmeans.predict(features)
    return np.asarray(labels, np.int64)
