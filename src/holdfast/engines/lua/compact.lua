-- Forget the feed up to and including a revision. Request ids go with the commits that answer them.
--
-- KEYS  feed, meta
-- ARGV  the revision

local known = redis.call('HMGET', KEYS[2], 'layout', 'floor', 'revision', 'dropped', 'gaps')
local refused = foreign(known[1])
if refused then
  return refused
end
if not known[1] or known[4] == '1' then
  return 0
end
local floor = math.max(tonumber(known[2]), math.min(tonumber(ARGV[1]), tonumber(known[3])))
redis.call('HSET', KEYS[2], 'floor', text(floor))
redis.call('XTRIM', KEYS[1], 'MINID', '=', text(floor + 1) .. '-0')
if known[5] then
  local left = {}
  for low, high in string.gmatch(known[5], '(%d+)-(%d+)') do
    if tonumber(high) > floor then
      left[#left + 1] = low .. '-' .. high
    end
  end
  redis.call('HSET', KEYS[2], 'gaps', table.concat(left, ','))
end
return 1
