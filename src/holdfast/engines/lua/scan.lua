-- A page of live entries in key order, from one moment: {revision, more, key, entry, key, entry, ...}.
--
-- KEYS  entries, keys, meta
-- ARGV  now, low, high (as ZRANGEBYLEX takes them), limit, '1' for descending

local known = redis.call('HMGET', KEYS[3], 'layout', 'time', 'revision', 'dropped')
local refused = foreign(known[1])
if refused then
  return refused
end
if not known[1] or known[4] == '1' then
  return { '0', 0 }
end
local now, low, high, limit = present(ARGV[1], known[2]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local reverse = ARGV[5] == '1'
local answer, count = { known[3], 0 }, 0
while true do
  local wanted = math.min(limit + 1 - count, CHUNK)
  local page
  if reverse then
    page = redis.call('ZREVRANGEBYLEX', KEYS[2], high, low, 'LIMIT', 0, wanted)
  else
    page = redis.call('ZRANGEBYLEX', KEYS[2], low, high, 'LIMIT', 0, wanted)
  end
  if #page == 0 then
    return answer
  end
  local found = redis.call('HMGET', KEYS[1], unpack(page))
  for i = 1, #page do
    local raw = found[i]
    local expires = raw and expiry_of(raw)
    if raw and not (expires and expires <= now) then
      count = count + 1
      if count > limit then
        answer[2] = 1
        return answer
      end
      answer[#answer + 1] = page[i]
      answer[#answer + 1] = raw
    end
  end
  if #page < wanted then
    return answer
  end
  if reverse then
    high = '(' .. page[#page]
  else
    low = '(' .. page[#page]
  end
end
