-- The live entries of some keys, from one moment.
--
-- KEYS  entries, meta
-- ARGV  now, then the keys

local known = redis.call('HMGET', KEYS[2], 'layout', 'time')
local refused = foreign(known[1])
if refused then
  return refused
end
if not known[1] then
  return {}
end
local keys = {}
for i = 2, #ARGV do
  keys[i - 1] = ARGV[i]
end
local found, now = fetch(KEYS[1], keys), nil
for i = 1, #found do
  local expires = found[i] and expiry_of(found[i])
  if expires then
    now = now or present(ARGV[1], known[2])
    if expires <= now then
      found[i] = false
    end
  end
end
return found
