-- Commits after a revision: {floor, revision, ahead, commit, commit, ...}, each as XRANGE gives it.
-- `ahead` is 1 when there is no such position: it was given out by a server that is gone, and its commits with it.
--
-- KEYS  feed, meta
-- ARGV  the position, how many commits at most, how many bytes about

local known = redis.call('HMGET', KEYS[2], 'layout', 'floor', 'revision', 'gaps')
local refused = foreign(known[1])
if refused then
  return refused
end
local floor, revision, after = known[2] or '0', known[3] or '0', tonumber(ARGV[1])
local answer = { floor, revision, 0 }
if after > tonumber(revision) then
  answer[3] = 1
  return answer
end
for low, high in string.gmatch(known[4] or '', '(%d+)-(%d+)') do
  if after > tonumber(low) and after < tonumber(high) then
    answer[3] = 1
    return answer
  end
end
local limit, room = tonumber(ARGV[2]), tonumber(ARGV[3])
local start = '(' .. ARGV[1] .. '-0'
while after >= tonumber(floor) and after < tonumber(revision) and limit > 0 and room > 0 do
  local wanted = math.min(limit, 32)
  local page = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', wanted)
  for _, commit in ipairs(page) do
    answer[#answer + 1] = commit
    for i = 2, #commit[2], 2 do
      room = room - #commit[2][i]
    end
  end
  if #page < wanted then
    return answer
  end
  limit = limit - #page
  start = '(' .. page[#page][1]
end
return answer
