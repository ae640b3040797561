-- A space as it is: {meta as HGETALL gives it, usage likewise, the first expiry or nothing}.
--
-- KEYS  meta, usage, expiry

local meta = redis.call('HGETALL', KEYS[1])
local first = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
return { meta, redis.call('HGETALL', KEYS[2]), first[2] or '' }
