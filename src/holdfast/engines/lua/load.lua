-- Write entries as they are given, and raise the revision. The feed and the request ids are forgotten.
--
-- KEYS  entries, keys, expiry, feed, usage, requests:0, requests:1, meta
-- ARGV  now, run id, '1' if a restart loses nothing, '1' if there are replicas, durabilities this server can give
--       (',async,volatile,'), revision, then key, expiry or '', entry; and again

local META = KEYS[8]
local ID_MS_MAX = 4398046511104 -- 2^42
local known = redis.call('HMGET', META, 'layout', 'time', 'dropped', 'revision', 'durability', 'last_id')
local refused = foreign(known[1])
if refused then
  return refused
end
local alive = known[1] and known[3] ~= '1'
local durability = alive and known[5] or 'sync'
if not string.find(ARGV[5], ',' .. durability .. ',', 1, true) then
  return redis.error_reply('HFDURABILITY ' .. durability)
end
local keys, entries, expiring, lasting = {}, {}, {}, {}
for i = 7, #ARGV, 3 do
  local key, expires = ARGV[i], ARGV[i + 1]
  keys[#keys + 1] = key
  entries[#entries + 1] = key
  entries[#entries + 1] = ARGV[i + 2]
  if expires == '' then
    lasting[#lasting + 1] = key
  else
    expiring[#expiring + 1] = expires
    expiring[#expiring + 1] = key
  end
end
local charged, members, latest = {}, {}, -1
local replaced = fetch(KEYS[1], keys)
for i, key in ipairs(keys) do
  if replaced[i] then
    local old = parse(replaced[i])
    charge(charged, key, old.owner, -1, -#key - old.size)
  end
  local new = parse(entries[2 * i])
  charge(charged, key, new.owner, 1, #key + new.size)
  local updated = tonumber(new.updated)
  if updated > latest and updated < ID_MS_MAX then
    latest = updated
  end
  members[2 * i - 1], members[2 * i] = '0', key
end

local now = present(ARGV[1], known[2])
local first = known[4] or (ARGV[3] == '1' and 0 or now * 1000) -- see create.lua
local revision = text(math.max(tonumber(first), tonumber(ARGV[6])))
redis.call('HSET', META, 'layout', LAYOUT, 'revision', revision, 'floor', revision, 'dropped', '0')
if not alive then
  redis.call('HSET', META, 'durability', 'sync', 'audit_reads', '0', 'created_at', text(now))
end
if not known[1] then
  redis.call('HSET', META, 'time', '0', 'server', ARGV[2], 'replicated', ARGV[4])
end
if latest >= tonumber(string.match(known[6] or '0', '^%d+')) then -- the last id there can be of that time
  redis.call('HSET', META, 'last_id', text(latest) .. '-1048575')
end
each('HSET', KEYS[1], entries, 2)
each('ZADD', KEYS[2], members, 2)
each('ZADD', KEYS[3], expiring, 2)
each('ZREM', KEYS[3], lasting)
charge_all(KEYS[5], charged)
redis.call('UNLINK', KEYS[4], KEYS[6], KEYS[7])
redis.call('HDEL', META, 'gaps')
return revision
