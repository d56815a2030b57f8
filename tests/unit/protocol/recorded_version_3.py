"""Every control message as release 0.1.0 (protocol version 3) puts it on the wire; never changed.

Each as base64 of MessagePack: what a peer of that release sends, and all it knows how to read.
"""

from __future__ import annotations

import base64

_TEXTS = {
    "hello": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYakdHlwZaVoZWxsb6tpbnN0YW5jZV9pZKFhpWVwb2NoAaZs"
        "YXlvdXSPqm1vZGVsX25hbWWhba53ZWlnaHRzX2RpZ2VzdKF3rWNvbmZpZ19kaWdlc3ShY6hrdl9kdHlwZahi"
        "ZmxvYXQxNqpudW1fbGF5ZXJzHqxudW1fa3ZfaGVhZHMDqWhlYWRfc2l6ZUCxYmxvY2tfc2l6ZV90b2tlbnMQ"
        "q2Jsb2NrX2J5dGVzzgAFoACxYXR0ZW50aW9uX2JhY2tlbmSpcGFnZWQtY3B1rnJlZ2lvbl9zdHJpZGVzlM4A"
        "BaAAzTAAzIACq251bV9yZWdpb25zArBrdl9zY2FsZXNfZGlnZXN0oXO0dGVuc29yX3BhcmFsbGVsX3NpemUC"
        "tHRlbnNvcl9wYXJhbGxlbF9yYW5rAal0cmFuc3BvcnSjc2htsnRyYW5zcG9ydF9tZXRhZGF0YcQEbWV0YQ=="
    ),
    "hello_reply": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYakdHlwZatoZWxsb19yZXBseatpbnN0YW5jZV9pZKFipWVw"
        "b2NoAqZsYXlvdXSPqm1vZGVsX25hbWWhba53ZWlnaHRzX2RpZ2VzdKF3rWNvbmZpZ19kaWdlc3ShY6hrdl9k"
        "dHlwZahiZmxvYXQxNqpudW1fbGF5ZXJzHqxudW1fa3ZfaGVhZHMDqWhlYWRfc2l6ZUCxYmxvY2tfc2l6ZV90"
        "b2tlbnMQq2Jsb2NrX2J5dGVzzgAFoACxYXR0ZW50aW9uX2JhY2tlbmSpcGFnZWQtY3B1rnJlZ2lvbl9zdHJp"
        "ZGVzlM4ABaAAzTAAzIACq251bV9yZWdpb25zArBrdl9zY2FsZXNfZGlnZXN0oXO0dGVuc29yX3BhcmFsbGVs"
        "X3NpemUCtHRlbnNvcl9wYXJhbGxlbF9yYW5rAal0cmFuc3BvcnSjc2htsnRyYW5zcG9ydF9tZXRhZGF0YcQE"
        "bWV0YQ=="
    ),
    "acquire": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYqkdHlwZadhY3F1aXJlq2luc3RhbmNlX2lkoWGlZXBvY2gB"
        "rGhvbGRlcl9lcG9jaAKrdHJhbnNmZXJfaWSjeC0xqm51bV90b2tlbnNkpmRpZ2VzdMQgZGRkZGRkZGRkZGRk"
        "ZGRkZGRkZGRkZGRkZGRkZGRkZGSqZHVyYXRpb25fc8tAPgAAAAAAAKtmaXJzdF9ibG9jawOyd2FudF9ibG9j"
        "a19kaWdlc3Rzww=="
    ),
    "acquire_history": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYqkdHlwZa9hY3F1aXJlX2hpc3RvcnmraW5zdGFuY2VfaWSh"
        "YaVlcG9jaAGsaG9sZGVyX2Vwb2NoAqt0cmFuc2Zlcl9pZKN4LTGsYmxvY2tfaGFzaGVzkcQgZGRkZGRkZGRk"
        "ZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGSqbWluX2Jsb2NrcwGqZHVyYXRpb25fc8tAPgAAAAAAALJ3YW50X2Js"
        "b2NrX2RpZ2VzdHPDrXdhbnRfcGFydGlhbHPD"
    ),
    "granted": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYakdHlwZadncmFudGVkqGxlYXNlX2lkBKpkdXJhdGlvbl9z"
        "y0A+AAAAAAAApmJsb2Nrc5IBAq1ibG9ja19kaWdlc3RzksQgZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRk"
        "ZGRkZGTEIGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkqHBhcnRpYWxzkYOlYmxvY2sJqm51bV90"
        "b2tlbnMDqmJsb2NrX2hhc2jEIGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRk"
    ),
    "renew": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYSkdHlwZaVyZW5ld6t0cmFuc2Zlcl9pZKN4LTGsaG9sZGVy"
        "X2Vwb2NoAqpkdXJhdGlvbl9zy0A+AAAAAAAA"
    ),
    "renewed": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYOkdHlwZadyZW5ld2VkqmR1cmF0aW9uX3PLQD4AAAAAAACr"
        "aXNfYWRtaXR0ZWTD"
    ),
    "register": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYukdHlwZahyZWdpc3RlcqtpbnN0YW5jZV9pZKFhpWVwb2No"
        "Aaxob2xkZXJfZXBvY2gCq3RyYW5zZmVyX2lko3gtMapnZW5lcmF0aW9uBapudW1fdG9rZW5zZKZkaWdlc3TE"
        "IGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkq2ZpcnN0X2Jsb2NrA6ZibG9ja3OSAQKpdGltZW91"
        "dF9zy0BOAAAAAAAA"
    ),
    "registered": ("g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYKkdHlwZapyZWdpc3RlcmVkqmdlbmVyYXRpb24F"),
    "admitted": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYKkdHlwZahhZG1pdHRlZKt0cmFuc2Zlcl9pZKN4LTE="
    ),
    "posting": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYOkdHlwZadwb3N0aW5nq3RyYW5zZmVyX2lko3gtMapnZW5l"
        "cmF0aW9uBQ=="
    ),
    "first_token_ready": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYakdHlwZbFmaXJzdF90b2tlbl9yZWFkeat0cmFuc2Zlcl9p"
        "ZKN4LTGrZmlyc3RfdG9rZW6DqHRva2VuX2lkB6RzZWVk+6dsb2dwcm9igqdsb2dwcm9iy7/gAAAAAAAAo3Rv"
        "cJKSB8u/4AAAAAAAAJIJy7/4AAAAAAAApmRpZ2VzdMQgZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRk"
        "ZGStcHJlZmlsbF9lbmRfc8tAKQAAAAAAAK5wcmVmaWxsX3JlcG9ydIexbnVtX2NhY2hlZF90b2tlbnMBtG51"
        "bV9yZWFkX2JhY2tfdG9rZW5zArNudW1fcmVhZF9iYWNrX2J5dGVzA7NudW1fY29tcHV0ZWRfdG9rZW5zBLFy"
        "ZWFkX2JhY2tfb3V0Y29tZaRnb25lq3JlYWRfYmFja19zyz/QAAAAAAAAqWNvbXB1dGVfc8s/4AAAAAAAAA=="
    ),
    "written": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYqkdHlwZad3cml0dGVuq3RyYW5zZmVyX2lko3gtMapnZW5l"
        "cmF0aW9uBatmaXJzdF9ibG9jawOqbnVtX2Jsb2NrcwKqbnVtX3Rva2Vuc2SrZmlyc3RfdG9rZW6DqHRva2Vu"
        "X2lkB6RzZWVk+6dsb2dwcm9igqdsb2dwcm9iy7/gAAAAAAAAo3RvcJKSB8u/4AAAAAAAAJIJy7/4AAAAAAAA"
        "pmRpZ2VzdMQgZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGStcHJlZmlsbF9lbmRfc8tAKQAAAAAA"
        "AK5wcmVmaWxsX3JlcG9ydIexbnVtX2NhY2hlZF90b2tlbnMBtG51bV9yZWFkX2JhY2tfdG9rZW5zArNudW1f"
        "cmVhZF9iYWNrX2J5dGVzA7NudW1fY29tcHV0ZWRfdG9rZW5zBLFyZWFkX2JhY2tfb3V0Y29tZaRnb25lq3Jl"
        "YWRfYmFja19zyz/QAAAAAAAAqWNvbXB1dGVfc8s/4AAAAAAAAA=="
    ),
    "failed": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYWkdHlwZaZmYWlsZWSrdHJhbnNmZXJfaWSjeC0xpnJlYXNv"
        "bqhwcmVzc3VyZahpc19xdWlldMOmZGV0YWlso3doeQ=="
    ),
    "quiet": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYOkdHlwZaVxdWlldKt0cmFuc2Zlcl9pZKN4LTGqZ2VuZXJh"
        "dGlvbgU="
    ),
    "release": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYakdHlwZadyZWxlYXNlq2luc3RhbmNlX2lkoWGlZXBvY2gB"
        "q3RyYW5zZmVyX2lko3gtMaxob2xkZXJfZXBvY2gCp291dGNvbWWpY2FuY2VsbGVk"
    ),
    "released": ("g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYKkdHlwZahyZWxlYXNlZKhpc19xdWlldMI="),
    "declined": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYSkdHlwZahkZWNsaW5lZKZyZWFzb26kZ29uZaZkZXRhaWyj"
        "d2h5pWZpZWxkqWhlYWRfc2l6ZQ=="
    ),
    "instance": ("g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYGkdHlwZahpbnN0YW5jZQ=="),
    "instance_info": (
        "g6d2ZXJzaW9uA6hzZXF1ZW5jZQanbWVzc2FnZYukdHlwZa1pbnN0YW5jZV9pbmZvq2luc3RhbmNlX2lkoWKl"
        "ZXBvY2gCr2NvbnRyb2xfYWRkcmVzc7R0Y3A6Ly8xMjcuMC4wLjE6NTAwMKtmaW5nZXJwcmludMQgZGRkZGRk"
        "ZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGRkZGSmbGF5b3V0j6ptb2RlbF9uYW1loW2ud2VpZ2h0c19kaWdlc3Sh"
        "d61jb25maWdfZGlnZXN0oWOoa3ZfZHR5cGWoYmZsb2F0MTaqbnVtX2xheWVycx6sbnVtX2t2X2hlYWRzA6lo"
        "ZWFkX3NpemVAsWJsb2NrX3NpemVfdG9rZW5zEKtibG9ja19ieXRlc84ABaAAsWF0dGVudGlvbl9iYWNrZW5k"
        "qXBhZ2VkLWNwda5yZWdpb25fc3RyaWRlc5TOAAWgAM0wAMyAAqtudW1fcmVnaW9ucwKwa3Zfc2NhbGVzX2Rp"
        "Z2VzdKFztHRlbnNvcl9wYXJhbGxlbF9zaXplArR0ZW5zb3JfcGFyYWxsZWxfcmFuawGpdHJhbnNwb3J0o3No"
        "baxjYXBhYmlsaXRpZXOTpHB1bGykcHVzaKdoaXN0b3J5qm51bV9ibG9ja3NAr251bV9mcmVlX2Jsb2Nrczyw"
        "c29mdHdhcmVfdmVyc2lvbqUwLjEuMA=="
    ),
}
RECORDED = {name: base64.b64decode(text) for name, text in _TEXTS.items()}
