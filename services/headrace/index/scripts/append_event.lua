-- Append changes to the shard's stream, numbered in the same step as they are made. Precedes the scripts that change
-- entries.
--
-- Race prevented: were the change and its number two commands, a second writer's event could come between and carry the
-- number that belongs to ours, and a reader would take a loss for order or order for a loss.

-- The reply of a command to a key; what lies there with another type is junk and is dropped first.
local function replacing_junk(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true) then
    redis.call('DEL', key)
    reply = redis.pcall(command, key, ...)
  end
  return reply
end

-- `at`: events (key of the stream), numbers (key of the counts), kept (events), split (blocks in one event), namespace,
-- width. `blocks` may be empty.
local function append_event(at, holder, incarnation, op, tier, blocks)
  local field = incarnation .. ':' .. holder
  local start = 1
  repeat
    local stop = math.min(start + at.split - 1, #blocks)
    local number = replacing_junk('HINCRBY', at.numbers, field, 1)
    if type(number) == 'table' then -- not a number: junk
      redis.call('HDEL', at.numbers, field)
      number = redis.call('HINCRBY', at.numbers, field, 1)
    end
    replacing_junk('XADD', at.events, 'MAXLEN', '~', at.kept, '*', 'holder', holder, 'incarnation', incarnation,
      'number', number, 'op', op, 'tier', tier, 'namespace', at.namespace, 'width', at.width,
      'blocks', table.concat(blocks, '', start, stop))
    start = stop + 1
  until start > #blocks
end
