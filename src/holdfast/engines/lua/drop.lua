-- Remove all a space holds. Its meta stays, one revision further, so that versions go on if the name comes back.
--
-- KEYS  entries, keys, expiry, feed, usage, requests:0, requests:1, meta
-- ARGV  the bell's channel, when the space was made: one that was made anew since is another

local META = KEYS[8]
local known = redis.call('HMGET', META, 'layout', 'revision', 'dropped', 'created_at')
local refused = foreign(known[1])
if refused then
  return refused
end
if not known[1] or known[3] == '1' or known[4] ~= ARGV[2] then
  return 0
end
local revision = text(tonumber(known[2]) + 1)
redis.call('HSET', META, 'revision', revision, 'floor', revision, 'dropped', '1', 'audit_reads', '0')
redis.call('HDEL', META, 'gaps')
redis.call('UNLINK', unpack(KEYS, 1, 7))
redis.pcall('PUBLISH', ARGV[1], revision)
return 1
