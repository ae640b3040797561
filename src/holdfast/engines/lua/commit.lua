-- Evaluate a group of batches of one space and write what they did, once.
--
-- This does what engines/evaluation.py does, which is the specification: names and order are the same, so read them
-- side by side. Lua does not roll back, so everything is evaluated on an overlay (`G.writes`) first; the writes at the
-- end cannot fail halfway, because Redis refuses a script for lack of memory or disk at its first write or not at all.
-- What operations do is in operations.lua, which stands before this.
-- Strings are never compared with `<`: Lua does that by the server's locale.
--
-- KEYS  entries, keys, expiry, feed, usage, meta, requests:0, requests:1
-- ARGV  now, run id, '1' if a restart loses nothing, '1' if there are replicas, the durabilities this server can give,
--       the bell's channel, '1' if replicas are waited for; then the batches one after the other, each as
--       length, actor, request id, digest, number of conditions, number of operations, conditions, operations
--
-- The answer has one msgpack array per batch; engines/redis_packing.py reads it.

-- --- the space as it stands ---

local meta = redis.call('HMGET', KEYS[6], 'layout', 'revision', 'time', 'last_id', 'durability', 'dropped', 'server',
  'replicated', 'generation', 'gaps')
local known_space = meta[1]
if known_space and known_space ~= LAYOUT then
  return foreign(known_space)
end
local alive = known_space and meta[6] ~= '1'
local durability = alive and meta[5] or 'sync'
if not string.find(ARGV[5], ',' .. durability .. ',', 1, true) then
  return redis.error_reply('HFDURABILITY ' .. durability)
end

G.now = present(ARGV[1], meta[3])
G.now_text = text(G.now)
G.now_packed = cmsgpack.pack(G.now)
local trusted = ARGV[3] == '1'
local first_revision = trusted and 0 or G.now * 1000 -- see create.lua
G.revision = known_space and tonumber(meta[2]) or first_revision
local facts = {} -- of the meta, to be written: name, value, name, value
local jumped = false
if known_space and meta[7] ~= ARGV[2] and ARGV[2] ~= '' then
  if meta[7] ~= '' and not (trusted and meta[8] ~= '1') then
    -- Another server than the last time, and commits may be missing here: no version they had is given out again.
    local jump = G.revision + 4294967296 -- 2^32
    local gaps = meta[10] and meta[10] ~= '' and meta[10] .. ',' or ''
    facts = { 'gaps', gaps .. text(G.revision) .. '-' .. text(jump) }
    G.revision = jump
    jumped = true
  end
  facts[#facts + 1] = 'server'
  facts[#facts + 1] = ARGV[2]
end
if G.revision > 9007199254740991 - 2 * #ARGV then -- 2^53 - 1, and room for the group
  return redis.error_reply('HFREVISION ' .. text(G.revision))
end
if known_space and ARGV[4] == '1' and meta[8] ~= '1' then
  facts[#facts + 1] = 'replicated'
  facts[#facts + 1] = '1'
end
meta[4] = meta[4] or '0-0'
local id_ms, id_counter = string.match(meta[4], '^(%d+)-(%d+)$')
G.id_ms, G.id_counter = tonumber(id_ms), tonumber(id_counter)

G.stored = {} -- entries as they were before the group; false where there was none
G.writes, G.order = {}, {} -- key -> entry or false; the keys in the order they were first written
G.commits = {} -- {revision, actor, request id, changes, answer}
G.requests = {} -- actor and request id -> {digest, reply, revision}, of this group
G.charged = {} -- subspace/owner -> {keys, bytes}
G.touched = false
G.swept = nil -- the commit that tells of what has expired
G.due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', G.now_text, 'LIMIT', 0, 256) -- SWEEP_MAX

-- --- the group ---

-- The answer to a request that was answered before, if it was: {digest, reply}.
function F.recorded(asked, request)
  local mine = G.requests[asked]
  if mine then
    return mine
  end
  for i = 7, 8 do
    local version = redis.call('HGET', KEYS[i], asked)
    local commit = version and redis.call('XRANGE', KEYS[4], version .. '-0', version .. '-0')[1]
    if commit then
      local field = {}
      for j = 1, #commit[2], 2 do
        field[commit[2][j]] = commit[2][j + 1]
      end
      local at = tonumber(field.at)
      if at > G.now - 3600000 and field.actor == B.actor and field.request == request then -- REQUEST_WINDOW_MS
        local digest, results = string.sub(field.answer, 1, 24), string.sub(field.answer, 25)
        return { digest, '\148\000' .. cmsgpack.pack(tonumber(version), at) .. results }
      end
    end
  end
  return nil
end

function F.account(key, old, new)
  if old then
    if new and old.owner == new.owner then
      if old.size ~= new.size then
        charge(G.charged, key, new.owner, 0, new.size - old.size)
      end
      return
    end
    charge(G.charged, key, old.owner, -1, -#key - old.size)
  end
  if new then
    charge(G.charged, key, new.owner, 1, #key + new.size)
  end
end

function F.overwrite(key, entry)
  if G.writes[key] == nil then
    G.order[#G.order + 1] = key
  end
  G.writes[key] = entry
end

-- Tell of what has expired, in a commit before the group's first; what later batches find expired too joins it.
function F.sweep()
  local of_batch, expired = B.changes, B.expired
  if #G.due > 0 then
    local raws = fetch(KEYS[1], G.due)
    for i, key in ipairs(G.due) do
      if not expired[key] then
        if G.stored[key] == nil then
          G.stored[key] = raws[i] and parse(raws[i])
        end
        expired[key] = G.stored[key]
        expired[#expired + 1] = key
      end
    end
    G.due = {}
    G.revision = G.revision + 1
    G.swept = { text(G.revision), 'holdfast', '', {}, '' }
    G.commits[#G.commits + 1] = G.swept
  end
  B.changes = G.swept[4]
  for _, key in ipairs(expired) do
    local entry = expired[key]
    if G.writes[key] ~= false then
      F.change('\153\166expire', key, false, '', 0, entry.owner, '', entry.tag, nil)
      F.overwrite(key, false)
      F.account(key, entry, false)
    end
  end
  B.changes = of_batch
end

function F.accept(request, asked, digest, operations, results)
  if #G.due > 0 or #B.expired > 0 then
    F.sweep()
  end
  local recorded = asked and operations > 0
  if recorded or #B.changes > 0 then
    G.revision = B.version
    G.id_ms, G.id_counter = B.id_ms, B.id_counter
    G.commits[#G.commits + 1] = { B.version_text, B.actor, request, B.changes, asked and digest .. results or '' }
  elseif #B.order > 0 then
    G.touched = true
  end
  for _, key in ipairs(B.order) do
    F.overwrite(key, B.writes[key])
  end
  for _, pair in ipairs(B.replaced) do
    F.account(pair[1], pair[2], pair[3])
  end
  local reply = '\148\000' .. cmsgpack.pack(G.revision) .. G.now_packed .. results
  if recorded then
    G.requests[asked] = { digest, reply, B.version_text }
  end
  return reply
end

function F.evaluate(first)
  local request, digest = ARGV[first + 1], ARGV[first + 2]
  local conditions, operations = tonumber(ARGV[first + 3]), tonumber(ARGV[first + 4])
  local asked
  B.actor = ARGV[first]
  if request ~= '' then
    asked = B.actor .. '\n' .. request
    local known = F.recorded(asked, request)
    if known then
      return known[1] == digest and known[2] or '\145\006'
    end
  end
  B.version = G.revision + (#G.due > 0 and 2 or 1)
  B.version_text = text(B.version)
  B.id_ms, B.id_counter = G.id_ms, G.id_counter
  B.writes, B.order, B.changes, B.replaced = {}, {}, {}, {}
  B.expired = {} -- entries by key, and the keys in the order they were found
  local i = first + 5
  for index = 0, conditions - 1 do
    local refused = F.refused(i, index)
    if refused then
      return refused
    end
    i = i + 3
  end
  local results = { F.array(operations) }
  for index = 1, operations do
    local result
    result, i = F.perform(i)
    if not result then
      return i
    end
    results[index + 1] = result
  end
  return F.accept(request, asked, digest, operations, table.concat(results))
end

local replies = {}
local position = 8
while position <= #ARGV do
  replies[#replies + 1] = F.evaluate(position + 1)
  position = position + 1 + tonumber(ARGV[position])
end

-- --- the post-images ---

if #G.commits == 0 and not G.touched then
  if jumped then
    redis.call('HSET', KEYS[6], 'revision', text(G.revision), unpack(facts))
  elseif ARGV[7] == '1' and known_space then
    redis.call('HSET', KEYS[6], 'layout', LAYOUT) -- so that waiting for replicas covers what these answers show
  end
  return replies
end

local puts, added, removed, expiring, lasting = {}, {}, {}, {}, {}
for _, key in ipairs(G.order) do
  local entry, old = G.writes[key], G.stored[key]
  if entry then
    puts[#puts + 1] = key
    puts[#puts + 1] = F.raw_of(entry)
    if not old then
      added[#added + 1] = '0'
      added[#added + 1] = key
    end
    if entry.expires then
      if not old or old.expires ~= entry.expires then
        expiring[#expiring + 1] = text(entry.expires)
        expiring[#expiring + 1] = key
      end
    elseif old == nil or (old and old.expires) then
      lasting[#lasting + 1] = key
    end
  elseif old ~= false then
    removed[#removed + 1] = key
    if not old or old.expires then
      lasting[#lasting + 1] = key
    end
  end
end
-- Puts come first: Redis then refuses the whole group for lack of memory, and a group that only removes goes through.
each('HSET', KEYS[1], puts, 2)
each('HDEL', KEYS[1], removed, 1)
each('ZADD', KEYS[2], added, 2)
each('ZREM', KEYS[2], removed, 1)
each('ZADD', KEYS[3], expiring, 2)
each('ZREM', KEYS[3], lasting, 1)
charge_all(KEYS[5], G.charged)

for _, commit in ipairs(G.commits) do
  redis.call('XADD', KEYS[4], commit[1] .. '-0', 'at', G.now_text, 'actor', commit[2], 'request', commit[3],
    'changes', F.array(#commit[4]) .. table.concat(commit[4]), 'answer', commit[5])
end
if next(G.requests) then
  -- Ids of this hour and of the one before are kept, in two hashes that take turns.
  local hour = math.floor(G.now / 3600000) -- REQUEST_WINDOW_MS
  local last = tonumber(meta[9] or hour)
  local current, previous = KEYS[7 + hour % 2], KEYS[8 - hour % 2]
  if last < hour then
    redis.call('UNLINK', current)
    if last < hour - 1 then
      redis.call('UNLINK', previous)
    end
  end
  if last < hour or not meta[9] then
    facts[#facts + 1] = 'generation'
    facts[#facts + 1] = text(hour)
  end
  local ids = {}
  for asked, answered in pairs(G.requests) do
    ids[#ids + 1] = asked
    ids[#ids + 1] = answered[3]
  end
  each('HSET', current, ids, 2)
end
if not alive then
  for _, fact in ipairs({ 'layout', LAYOUT, 'durability', 'sync', 'audit_reads', '0', 'created_at', G.now_text, 'dropped', '0' }) do
    facts[#facts + 1] = fact
  end
  if not known_space then
    for _, fact in ipairs({ 'floor', text(first_revision), 'server', ARGV[2], 'replicated', ARGV[4], 'time', '0' }) do
      facts[#facts + 1] = fact
    end
  end
end
if #G.commits > 0 then
  facts[#facts + 1] = 'time'
  facts[#facts + 1] = G.now_text
  local last_id = text(G.id_ms) .. '-' .. text(G.id_counter)
  if last_id ~= meta[4] then
    facts[#facts + 1] = 'last_id'
    facts[#facts + 1] = last_id
  end
end
redis.call('HSET', KEYS[6], 'revision', text(G.revision), unpack(facts))
if #G.commits > 0 then
  redis.pcall('PUBLISH', ARGV[6], text(G.revision))
end
return replies
