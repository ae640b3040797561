-- Do once what the other scripts do, on a key of no use: a user who lacks a right is refused here, and not in the middle
-- of a commit, where Redis would leave half of it behind. What else may be wrong is the commit's own business.
--
-- KEYS  a key of the space

local key = KEYS[1]
for _, command in ipairs({
  { 'HSET', key, 'f', 'v' }, { 'HGET', key, 'f' }, { 'HMGET', key, 'f' }, { 'HGETALL', key }, { 'HDEL', key, 'f' },
  { 'ZADD', key, '0', 'm' }, { 'ZRANGE', key, '0', '0' }, { 'ZRANGEBYSCORE', key, '0', '0' },
  { 'ZRANGEBYLEX', key, '-', '+' }, { 'ZREVRANGEBYLEX', key, '+', '-' }, { 'ZREM', key, 'm' },
  { 'XADD', key, '1-0', 'f', 'v' }, { 'XRANGE', key, '-', '+' }, { 'XTRIM', key, 'MINID', '=', '2-0' },
  { 'UNLINK', key }, { 'TIME' },
}) do
  local answer = redis.pcall(unpack(command))
  local wrong = type(answer) == 'table' and answer.err
  if wrong and (string.find(wrong, "can't", 1, true) or string.find(wrong, 'NOPERM', 1, true)) then
    return redis.error_reply('NOPERM ' .. string.lower(command[1]) .. ' on ' .. key .. ': ' .. wrong)
  end
end
return 1
