"""The planted faults. Each is a mistake that somebody makes, or that this project made (docs/simulation.md)."""

from tests.mutants.planting import CORE, PEERS, Edit, Mutant


def _one(name: str, path: str, old: str, new: str, start: int = 0, test: str = "") -> Mutant:
    return Mutant(name, [Edit(path, old, new)], start, test)


MUTANTS = [
    Mutant(
        "no host pin on load-back",
        [
            Edit(f"{CORE}/load_back.py", "        pool.pin(host_pages)\n", ""),
            Edit(
                f"{CORE}/load_back.py",
                "            self._host.unpin(operation.pool, operation.host_pages)\n",
                "            self._state.space_freed = True\n",
            ),
            Edit(f"{CORE}/operations.py", "class Load(PinsHostPages)", "class Load(Operation)"),
        ],
    ),
    Mutant(
        "unlock by path instead of by receipt",
        [
            Edit(f"{CORE}/tree_holds.py", '__slots__ = ("node",)', '__slots__ = ("node", "path")'),
            Edit(
                f"{CORE}/tree_holds.py",
                "        lock = Lock(node)\n",
                "        lock = Lock(node)\n        lock.path = list(self.upward(node))\n",
            ),
            Edit(
                f"{CORE}/tree_holds.py",
                "        while step is not None:\n            step.lock_ref -= 1\n",
                "        for step in lock.path:\n            step.lock_ref -= 1\n",
            ),
        ],
    ),
    _one(
        "free before the ack",
        f"{CORE}/backup.py",
        "            if operation.committing:\n                lock, operation.lock",
        "            if operation.pool is not None and not operation.committing:\n"
        "                self._host.give_back(operation.pool, operation.host_pages)\n"
        "                operation.host_pages = operation.host_pages[:0]\n"
        "            if operation.lock is not None:\n                lock, operation.lock",
    ),
    _one(
        "a release not awaited",
        f"{CORE}/host_memory.py",
        "                operation = Release(pool=pool, host_pages=part)\n",
        "                operation = Release(pool=pool, host_pages=part[:0])\n"
        "                pool.releasing -= len(part)\n"
        "                pool.free(part)\n",
    ),
    _one(
        "a split forgets its second part",
        f"{CORE}/backup.py",
        "        nodes = self._state.tree.covered(lock, len(operation.host_pages))\n        at = 0\n",
        "        nodes = self._state.tree.covered(lock, len(operation.host_pages))[:1]\n        at = 0\n",
    ),
    _one(
        "a split forgets the lock",
        f"{CORE}/tree.py",
        'for name in ("lock_ref", "hit_count"',
        'for name in ("hit_count"',
    ),
    _one(
        "pages matched while still loading",
        f"{CORE}/admission.py",
        "request.loads = _loads(path)",
        "request.loads = set()",
    ),
    _one(
        "a namespace skipped",
        f"{CORE}/requests.py",
        "namespace_seed(names.tenant, names.lora_id, names.extra_key)",
        'namespace_seed(names.tenant + names.lora_id + names.extra_key, "", "")',
    ),
    _one(
        "no fence",
        f"{CORE}/peers.py",
        "        self._state.operations.start(operation, Fence(op_id), [key])\n",
        "        self._state.operations.start(operation, Fence(op_id), [key])\n"
        "        self._state.operations.answered(op_id, key)\n"
        "        self._fenced(key, None, op_id)\n",
    ),
    _one(
        "receiver epoch ignored",
        f"{PEERS}/process.py",
        "receiver != self.key.epoch or sender < self.scheduler_epoch",
        "sender < self.scheduler_epoch",
    ),
    _one(
        "duplicates not freed", f"{CORE}/device_memory.py", "        self._state.device.free(inserted.duplicates)\n", ""
    ),
    _one(
        "tail page not freed",
        f"{CORE}/device_memory.py",
        "request.pages[max(full, request.shared) :]",
        "request.pages[max(full, request.shared) + 1 :]",
    ),
    _one(
        "op_id reused",
        f"{CORE}/operations.py",
        "        op_id, self._next_id = self._next_id, self._next_id + 1\n",
        "        op_id, self._next_id = self._next_id, self._next_id % 40 + 1\n",
    ),
    _one("hits counted twice", f"{CORE}/backup.py", "            if at >= first:\n", "            if True:\n"),
    _one(
        "a lost span left in mid-path",
        f"{CORE}/host_memory.py",
        "            if not node.detached and not node.is_root and node.value is None and node.host is None:\n",
        "            if False:\n",
    ),
    _one(
        "evict of a locked leaf",
        f"{CORE}/leaves.py",
        "node.value is not None and not node.lock_ref and not node.valued_children",
        "node.value is not None and not node.valued_children",
    ),
    _one(
        "a prefetch finished after cancel",
        f"{CORE}/prefetch.py",
        "                self._state.operations.cancel(operation)\n                self.end(operation, request)\n",
        "                self._state.operations.cancel(operation)\n"
        "                self._give_back(operation, set())\n"
        "                operation.host_pages = operation.host_pages[: operation.taken]\n"
        "                self.end(operation, request)\n",
    ),
    _one(
        "a late ack after abort",
        f"{CORE}/requests.py",
        "        if not request.in_flight:\n            self.drained(request)\n",
        "        self.drained(request)\n",
    ),
    _one(
        "a retracted request's rows kept",
        f"{CORE}/requests.py",
        "        self.rows.append(request.row)\n",
        "        if request.key not in self.all:\n            self.rows.append(request.row)\n",
    ),
    Mutant(
        "an uncommitted page adopted",
        [
            Edit(
                f"{PEERS}/storage.py",
                "    def _list(self, segment: Segment, message: ListPages) -> Message:\n",
                "    def _list(self, segment: Segment, message: ListPages) -> Message:\n"
                "        for page, digest in self.begun.items():\n"
                "            segment.names.setdefault(page, Name(digest, checksum(segment.parts(page))))\n",
            ),
            Edit(
                f"{PEERS}/storage.py",
                "        self.hello()\n        self.later(WATCH_S",
                "        self.begun: dict[int, bytes] = {}\n        self.hello()\n        self.later(WATCH_S",
            ),
            Edit(
                f"{PEERS}/storage.py",
                "        transfer = self._transfer(message.op_id)\n        corrupt = 0\n",
                "        transfer = self._transfer(message.op_id)\n        corrupt = 0\n"
                "        self.begun |= dict(zip(pages, split_digests(message.digests), strict=True))\n",
            ),
        ],
    ),
    _one(
        "one id leased to two replicas",
        f"{PEERS}/storage.py",
        "        world.segments[self.key.identity, segment.info.epoch] = self.current = segment\n",
        "        if world.first is not world and world.first.segments and world.ranks == 1:\n"
        "            segment = list(world.first.segments.values())[-1]\n"
        "        world.segments[self.key.identity, segment.info.epoch] = self.current = segment\n",
    ),
    _one(
        "a superseded scheduler goes on",
        f"{CORE}/core.py",
        "        self.superseded = True ",
        "        pass ",
    ),
    # --- beyond the list
    _one(
        "a step doesn't wait for its loads",
        f"{CORE}/admission.py",
        "items, sorted(loads), before)",
        "items, [], before)",
    ),
    _one(
        "checksums not compared at a load",
        f"{PEERS}/jobs.py",
        "            elif name.checksums[4 * worker.rank :][:4] != checksum([content]):\n",
        "            elif False:\n",
    ),
    _one(
        "pages of a lost peer freed",
        f"{CORE}/core.py",
        "                self.state.operations.fail(operation)\n\n    def group_ready",
        "                self.state.operations.fail(operation)\n"
        "        self._deal_with_failures()\n"
        "        for operation in self.state.operations.gone(peer):\n"
        "            self._settle(operation)\n\n    def group_ready",
    ),
    _one(
        "a committed backup keeps its lock",
        f"{CORE}/backup.py",
        "        operation.lock = None\n        self._state.unlock(lock)\n        if operation.evicts",
        "        operation.lock = None\n        if operation.evicts",
    ),
    _one(
        "an eviction from the host isn't published",
        f"{CORE}/tree_holds.py",
        "        self._removed(node, CPU)\n",
        "        pass\n",
    ),
    _one(
        "pages that L3 dropped stay published",
        f"{CORE}/publish.py",
        "                self.list.append(BlockRemoved([digest], medium))\n",
        "                pass\n",
    ),
    # --- bugs of the past
    _one(
        "past: a step's overshoot joins the tree",
        f"{CORE}/device_memory.py",
        "known = min(request.computed, request.length)",
        "known = request.computed",
    ),
    _one(
        "past: steps after a failed one trusted",
        f"{CORE}/steps.py",
        "            if request.in_flight:  # a later step was built on this one\n"
        "                request.trusted = False\n",
        "",
        test="tests/conformance/test_worker_answers.py::test_what_a_step_behind_a_failed_one_computes_joins_no_tree",
    ),
    _one(
        "past: a result before an earlier one taken",
        f"{CORE}/steps.py",
        "            if self._overtook(step, request, attempt):\n",
        "            if False:\n",
    ),
    _one(
        "past: a step overtakes its loads",
        f"{CORE}/operations.py",
        "isinstance(operation, (Control, Step, Load))",
        "isinstance(operation, (Control, Step))",
        test="tests/unit/scheduler/test_operations.py::"
        "test_loads_take_no_credit_so_that_a_step_never_waits_for_one_that_was_not_sent",
    ),
    _one(
        "past: a fetch takes another's tokens",
        f"{CORE}/prefetch.py",
        "            tokens = operation.tokens[: (operation.first + count) * tree.page_bytes]\n",
        "            source = bytes(operation.requests[0].tokens) if operation.requests else operation.tokens\n"
        "            tokens = source[: (operation.first + count) * tree.page_bytes]\n",
        test="tests/conformance/test_store.py::"
        "test_store_06_a_fetch_joined_by_a_longer_prompt_keeps_to_the_tokens_it_was_asked_for",
    ),
    _one(
        "past: admitted while in a lookup",
        f"{CORE}/admission.py",
        "            if request.state not in states or type(request.fetch) is Adopt:\n",
        "            if False:\n",
    ),
    _one(
        "past: a host copy that eviction can't see",
        f"{CORE}/tree_holds.py",
        "        self._offer_host(node)  # a locked node's host copy can go now\n",
        "",
    ),
    _one(
        "past: a page table taken for received",
        f"{CORE}/request.py",
        "        self.scheduled, self.synced = self.computed, 0\n",
        "        self.scheduled = self.computed\n",
    ),
    _one(
        "past: a living worker taken for dead",
        f"{CORE}/peers.py",
        "            if worker.key == key and segment_epoch in worker.mapped:",
        "            if worker.key == key:",
    ),
    _one(
        "past: commands for an exited worker",
        f"{CORE}/peers.py",
        "                worker.fenced = False\n                self._withdraw_group()\n"
        "                self._fence(key)\n",
        "                pass\n",
    ),
    _one(
        "past: segments never dropped",
        f"{CORE}/peers.py",
        "!= keep and holder not in storage.dropping:\n                    self._drop(storage, worker, holder)\n",
        "!= keep and holder not in storage.dropping:\n                    pass\n",
    ),
    _one(
        "past: a fence for each hello",
        f"{CORE}/peers.py",
        "        if known is not None and known.message is not None and not known.failed:\n",
        "        if False:\n",
        test="tests/conformance/test_fence.py::test_many_hellos_share_one_fence",
    ),
    _one(
        "past: a repeat follows the fence",
        f"{CORE}/operations.py",
        "overtaken = operation.op_id < self._held.get(peer, 0)",
        "overtaken = False",
        test="tests/conformance/test_fence.py::test_no_command_from_before_a_fence_follows_it",
    ),
    _one(
        "past: an unsent command expires with its credit",
        f"{CORE}/operations.py",
        "                    del backlog[position]  # it never left; its credit was never spent\n"
        "                    return\n",
        "                    break\n",
        test="tests/unit/scheduler/test_operations.py::test_what_was_never_sent_can_be_taken_back_at_once",
    ),
    _one(
        "past: an old wish to wait for a backup blocks",
        f"{CORE}/admission.py",
        "        self._device.waits = False\n",
        "",
    ),
    _one(
        "past: a load of the rank that stays is forgotten",
        f"{CORE}/core.py",
        "isinstance(operation, (Write, Load)) and operation.lock is not None",
        "isinstance(operation, Write) and operation.lock is not None",
        test="tests/conformance/test_ranks.py::"
        "test_a_load_that_only_the_remaining_rank_owes_ends_with_the_replaced_one",
    ),
    _one(
        "past: an archive's old answer counts",
        f"{CORE}/archive.py",
        "set(unpack_list(stored)) - gone",
        "set(unpack_list(stored))",
        test="tests/conformance/test_events.py::"
        "test_tier_10_an_archive_s_answer_that_comes_after_its_pages_were_dropped_stores_nothing",
    ),
    _one(
        "past: a step's pages go with the step behind it",
        f"{CORE}/steps.py",
        "            if heir is not None:\n",
        "            if False:\n",
    ),
    _one(
        "past: a step runs without the lost one before it",
        f"{PEERS}/worker.py",
        "            case RunStep() if message.after and self._misses(message.after):\n",
        "            case RunStep() if False:\n",
    ),
    _one(
        "past: a lookup waits for its own room",
        f"{CORE}/prefetch.py",
        " or (full and self._kept(pool) + count > share)",
        "",
        test="tests/conformance/test_adoption.py::"
        "test_store_06_a_lookup_does_not_wait_for_the_room_that_its_own_request_has_reserved",
    ),
    _one(
        "past: waiting lookups keep device memory locked",
        f"{CORE}/prefetch.py",
        "        hungry, self._hungry = self._hungry, []\n        for find, _ in hungry:\n",
        "        hungry: list[tuple[Find, int]] = []\n        for find, _ in hungry:\n",
        test="tests/conformance/test_store.py::"
        "test_store_06_lookups_that_wait_for_host_pages_give_way_to_a_request_that_can_run",
    ),
]
