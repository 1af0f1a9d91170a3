"""Headrace: a distributed prefix cache for LLM inference, with prefill and decode on separate workers.

The path of a request, as `file:function`:

    gateway/openai_http.py:build_http_app        HTTP in, OpenAI's shape
    gateway/inference_grpc.py:Generate           gRPC in
    wire/parse.py:parse_generate_request         outside bytes become a request that cannot be wrong
    gateway/prepare_request.py:prepare_request   a request as workers take it: ids, hashes, defaults
    gateway/tokenize_prompt.py:tokenize_prompt   text or chat becomes token ids, off the loop
    core/block.py:hash_prompt                    token ids become a chain of block hashes
    index/index_mirror.py:longest_prefix         who holds how much of the chain
    core/choose_workers.py:choose_workers        which workers, by predicted seconds
    gateway/route_request.py:route_request       prefill and decode together; new attempts when a worker dies
    gateway/prefill_beside.py:prefill_beside     the prefill attempt, and what becomes of it
    prefill/prefill_prompt.py:prefill_prompt     load what is held, compute the rest, publish
    transfer/load_prefix.py:load_prefix          blocks from device, shared memory or gRPC, verified
    transfer/load_window.py:load_window          the same for models that look back only so far
    transfer/load_layered.py:load_layered        the same where only some of a model's layers do
    transfer/publish_blocks.py:publish_blocks    bytes first, commit with checksum, index entry last
    transfer/follow_prefill.py:follow_prefill    take the blocks of a prefill as they appear
    decode/decode_tokens.py:decode_tokens        load, compute the remainder, join the batch, stream

Within a worker, step by step:

    engine/schedule_step.py:schedule_step        which rows of which sequences are computed next, and who gives way
    engine/follow_runs.py:follow_runs            equal beginnings of the same moment are computed once
    engine/lay_out_step.py:lay_out_step          their rows, slots and tables: what one call of the model takes
    engine/attention.py:paged_attention          a layer's queries over the pages of their sequences
    engine/sample_token.py:sample_token          the next token, from its own row of logits only
"""

__version__ = "0.1.0"
