#!lua flags=no-writes
-- The leading run of every holder of a chain's first block.
--
-- Race prevented: blocks are registered and deregistered all the time; probes at different instants could see a holder
-- with block 900 and without block 800 and report a run that it never had. A script sees one instant.
--
-- What a holder keeps under one incarnation is prefix-closed, so a holder's run is found by bisection, for all holders
-- together: one probe of one block splits them into those who go on and those who have ended before it.
--
-- KEYS[1]  prefix of the namespace's block keys
-- ARGV     the chain's hashes packed, bytes of one hash, most holders to consider
-- Returns  {junk entries, holder, incarnation, depth, holder, incarnation, depth, ...}
local prefix, packed, width, holders_max = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local num_blocks = #packed / width
local incarnation_pattern = '^(' .. string.rep('%d', 20) .. '):'
local reply = {0}

local function key_at(depth)
  return prefix .. string.sub(packed, (depth - 1) * width + 1, depth * width)
end

-- Holders of the first block: {{name, incarnation}, ...}. HRANDFIELD instead of HGETALL bounds what is read; with a
-- count above the size it returns everything.
local function first_holders()
  local pairs_read = redis.pcall('HRANDFIELD', key_at(1), holders_max, 'WITHVALUES')
  if pairs_read.err then
    reply[1] = reply[1] + 1
    return {}
  end
  local holders = {}
  for i = 1, #pairs_read, 2 do
    local incarnation = string.match(pairs_read[i + 1], incarnation_pattern)
    if incarnation then
      holders[#holders + 1] = {pairs_read[i], incarnation}
    else
      reply[1] = reply[1] + 1
    end
  end
  return holders
end

-- Those of `holders` that keep the block at `depth` under the same incarnation, and the others.
local function split(depth, holders)
  local names = {}
  for i, holder in ipairs(holders) do names[i] = holder[1] end
  local entries = redis.pcall('HMGET', key_at(depth), unpack(names))
  if entries.err then
    reply[1] = reply[1] + 1
    return {}, holders
  end
  local going_on, ended = {}, {}
  for i, holder in ipairs(holders) do
    local side = entries[i] and string.match(entries[i], incarnation_pattern) == holder[2] and going_on or ended
    side[#side + 1] = holder
  end
  return going_on, ended
end

local function report(depth, holders)
  for _, holder in ipairs(holders) do
    reply[#reply + 1] = holder[1]
    reply[#reply + 1] = holder[2]
    reply[#reply + 1] = depth
  end
end

-- All of `holders` keep the block at `low`, none of them keeps the one at `high`.
local function bisect(low, high, holders)
  if #holders == 0 then return end
  if high - low == 1 then return report(low, holders) end
  local middle = math.floor((low + high) / 2)
  local going_on, ended = split(middle, holders)
  bisect(middle, high, going_on)
  bisect(low, middle, ended)
end

local candidates = first_holders()
if #candidates > 0 then
  local whole, partial = candidates, {}
  -- The whole chain first: the usual answer for a prompt seen before.
  if num_blocks > 1 then whole, partial = split(num_blocks, candidates) end
  report(num_blocks, whole)
  bisect(1, num_blocks, partial)
end
return reply
