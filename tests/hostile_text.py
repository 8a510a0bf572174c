"""A text that tries to be more than text."""

HOSTILE = (
    '<script>window.taken=1</script><img src="http://127.0.0.1:9/x" onerror="window.taken=1">'
    "</pre></textarea></template>{{ 7*7 }}\"'><form id=turn action=//127.0.0.1:9>\u202egnp.\u2066"
)
