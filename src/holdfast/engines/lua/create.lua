-- Make a space, or find it: the durability it has.
--
-- KEYS  meta
-- ARGV  now, run id, '1' if a restart loses nothing, '1' if there are replicas, durability, '1' to audit reads

local META = KEYS[1]
local known = redis.call('HMGET', META, 'layout', 'time', 'dropped', 'durability')
local refused = foreign(known[1])
if refused then
  return refused
end
if known[1] and known[3] ~= '1' then
  if known[4] == ARGV[5] and ARGV[6] == '1' then
    redis.call('HSET', META, 'audit_reads', '1')
  end
  return known[4]
end
local now = present(ARGV[1], known[2])
if not known[1] then
  -- Where a restart or a failover may lose the space itself, its versions begin beyond all it can have given out.
  local first = ARGV[3] == '1' and '0' or text(now * 1000)
  redis.call('HSET', META, 'layout', LAYOUT, 'revision', first, 'floor', first, 'time', '0', 'server', ARGV[2],
    'replicated', ARGV[4])
end
redis.call('HSET', META, 'durability', ARGV[5], 'audit_reads', ARGV[6], 'created_at', text(now), 'dropped', '0')
return ARGV[5]
