"""Every bound of the gateway, with its reason."""

MIB = 2**20

# What one request may bring.
MAX_BODY_BYTES = 8 * MIB  # a million token ids as JSON are 7 MB; far above any context served here
MAX_CHOICES = 16  # scheduler requests of one HTTP request (prompts x n): the default step holds 16
MAX_STOPS = 4  # OpenAI's limit
MAX_STOP_CHARS = 512  # the text held back in a stream is at most one stop string
MAX_LOGPROBS = 5  # completions: OpenAI's limit
MAX_TOP_LOGPROBS = 20  # chat: OpenAI's limit
MAX_BIASES = 1024  # entries of logit_bias: they travel with every step; OpenAI takes about 300
MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_CALLS = 8  # calls of one forced answer: a small model would go on until its tokens are spent
MAX_SCHEMA_BYTES = 32 * 1024  # all JSON schemas of a request: compiled in about 0.1 s; they travel with every step
MAX_SCHEMA_DEPTH = 64  # brackets within brackets: half of what the compiler takes
MAX_GRAMMARS = 64  # grammars known to be good; each is at most MAX_SCHEMA_BYTES and a little
MAX_SALT_CHARS = 256  # a cache salt is hashed into every page of its tenant: a name, not a document
MAX_ID_CHARS = 64  # of a request id that is asked about: an answer's have about 33
DEFAULT_MAX_TOKENS = 16  # completions without max_tokens: OpenAI's default

# What may be open at once.
MAX_OPEN_REQUESTS = 2048  # above the scheduler's queue (1,024 by default), whose own 429 knows the load, comes first
MAX_PENDING_EVENTS = 4096  # events that wait for a slow client; one a step, so that it is minutes behind
MAX_OWED_ABORTS = 4096  # aborts kept for a scheduler that is silent; twice the requests that can be open

# How long something may take.
BODY_TIMEOUT_S = 30.0  # 8 MiB over 2 Mbit/s; a client that sends nothing holds its place no longer
REQUEST_MARGIN_S = 5.0  # over the scheduler's own request timeout: its answer, which says more, comes first
NO_SCHEDULER_S = 30.0  # a supervisor restarts a scheduler within a few seconds; after this nobody is coming
PLACE_RETRY_S = 0.25  # between two tries to hand a request to a scheduler that can't be reached
MAX_RESUBMISSIONS = 3  # a request that outlived three schedulers may be what kills them
KEEP_ALIVE_S = 15.0  # below the 30 to 60 s after which proxies drop a silent connection
USAGE_WAIT_S = 0.25  # after a stop string: for the scheduler's word on the tiers; a round trip and a step
STATUS_TIMEOUT_S = 2.0  # for the scheduler's Status; a probe of /health waits 1 to 10 s as a rule
ADMIN_TIMEOUT_S = 40.0  # for a change of the stack: the scheduler gives a storage up that is silent for 30 s
DRAIN_S = 10.0  # running requests get this long after a stop; an orchestrator kills after 10 to 30 s
FLUSH_S = 2.0  # for the last errors to reach their clients after the drain

# What a client is told to wait, in Retry-After.
RETRY_BUSY_S = 1  # the queue moves with every finished request
RETRY_RESTART_S = 2  # a restarted scheduler is heard again within about two seconds

THREAD_CHARS = 4096  # a longer prompt is tokenized in a thread: 4k characters take about 8 ms of the event loop
